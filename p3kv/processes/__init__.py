"""What starts the processes of a job, and says which process this is."""
