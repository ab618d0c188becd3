"""What routers choose: gate events, traces of them, and the routers themselves. Knows no cache and no running model."""
