"""Records and measures real models on this machine: texts, guesses and times."""
