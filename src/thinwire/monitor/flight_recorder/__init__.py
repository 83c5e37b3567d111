"""Reader and writer of dumps of the Flight Recorder of torch."""
