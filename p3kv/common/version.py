"""The version of the package, also carried by every handshake."""

VERSION = "0.1.0"
