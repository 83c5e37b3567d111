"""What others offer for the same task, as they tell to use it: each file one program, for comparison only."""
