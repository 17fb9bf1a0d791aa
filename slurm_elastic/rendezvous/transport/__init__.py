"""Authenticated connections between agents: sessions, messages, listener, links."""
