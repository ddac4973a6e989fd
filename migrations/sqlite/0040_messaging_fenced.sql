-- Writes about an outside effect that came after it had been taken over, and were turned away.
ALTER TABLE messaging_inbox ADD COLUMN fenced INTEGER NOT NULL DEFAULT 0;
