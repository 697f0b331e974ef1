"""What an iteration must take on any network, and what it takes in an ideal one."""
