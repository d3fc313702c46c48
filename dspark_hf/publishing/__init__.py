"""What a drafter's folder needs on the Hub, putting it there, and other forms of it."""
