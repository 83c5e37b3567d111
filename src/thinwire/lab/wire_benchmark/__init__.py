"""Who takes part in `bench wire`, and the program that every host of a lab runs for it."""
