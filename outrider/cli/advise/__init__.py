"""`outrider advise`: which draft, if any, a target should have for given traffic."""
