"""The pure core: what an experiment computes. No clock, files, environment, network or device names in here."""
