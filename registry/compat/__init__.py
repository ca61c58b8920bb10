"""Other libraries' functions, with their arguments and meaning, run by the registry. They need not be installed."""
