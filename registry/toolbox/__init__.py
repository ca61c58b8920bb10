"""What a kernel author imports: launches, tensor maps, outputs, counters, arithmetic, builds."""
