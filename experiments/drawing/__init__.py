"""What figures share: medians, schedules and their looks."""
