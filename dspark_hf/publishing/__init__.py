"""Cards and publishing: what a drafter's folder needs on the Hub, and putting it there."""
