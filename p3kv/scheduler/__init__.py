"""The scheduler: which processes belong to the job, what they agree on, and how the job ends."""
