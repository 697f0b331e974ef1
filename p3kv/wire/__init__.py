"""Messages, framing and connections: how processes talk, whatever they say."""
