"""What is recorded and measured of real models on this machine: texts, guesses, times."""
