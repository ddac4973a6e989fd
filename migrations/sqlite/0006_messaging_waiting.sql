-- What waits for its predecessor: few rows, found by what they wait for and by when they are to run in any case.
CREATE INDEX messaging_inbox_waiting ON messaging_inbox (consumer, waiting_for) WHERE state = 'waiting';
CREATE INDEX messaging_inbox_due ON messaging_inbox (consumer, lease_until) WHERE state = 'waiting';
