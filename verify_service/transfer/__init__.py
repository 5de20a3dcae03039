"""Keys and values that leave this replica for another one, or come from one."""
