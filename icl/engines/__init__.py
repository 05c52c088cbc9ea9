"""How the runs of a sweep are spread over devices: on this machine, by Ray, by W&B. An engine decides who trains what
when; what comes out is the same, since a run is a function of its spec."""
