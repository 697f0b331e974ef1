"""What figures make of runs: the numbers and tables of each, and the looks that all share."""
