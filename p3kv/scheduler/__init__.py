"""The scheduler: who belongs to the job, what all agree on, and how it ends."""
