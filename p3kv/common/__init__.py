"""What all parts use: addresses, names, words, spans."""
