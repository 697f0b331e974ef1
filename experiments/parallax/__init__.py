"""Parallax (EuroSys'19): its models, emulated, with p3kv and its peers."""
