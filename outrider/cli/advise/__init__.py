"""`outrider advise`: which draft a target should have for some traffic, or none."""
