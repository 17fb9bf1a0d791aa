"""The rendezvous: membership of rounds, election of the leader, transport and records."""
