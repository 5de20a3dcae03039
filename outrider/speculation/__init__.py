"""What is proposed below the committed tokens, and how likely the target is to choose it."""
