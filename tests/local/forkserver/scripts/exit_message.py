raise SystemExit("a message instead of a number")
