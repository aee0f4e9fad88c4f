"""Variables that a supervisor sets for its ranks. Apart, since every rank looks for them."""

BEATS_ENV = "MEGATRON_NTP_BEATS"
EVENTS_ENV = "MEGATRON_NTP_EVENTS"
