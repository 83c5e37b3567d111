"""The command line: options, one library call, print. The only place that prints and reads the environment."""
