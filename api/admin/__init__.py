"""The admin process: what operators see and change over REST, a client of the sidecar like any other."""
