"""A run's folder as one page that is live: what is read of it, and the server that shows it."""
