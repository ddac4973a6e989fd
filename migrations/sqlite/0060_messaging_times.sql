-- When a row went from the outbox to the broker, and the trace that an event which waits goes on with.
ALTER TABLE messaging_outbox ADD COLUMN claimed_at INTEGER;
ALTER TABLE messaging_outbox_archive ADD COLUMN claimed_at INTEGER;
ALTER TABLE messaging_inbox ADD COLUMN traceparent TEXT;
