"""Authenticated connections between agents: sessions, messages, the listener, and both ends of a connection."""
