-- Messages that one transaction handed to a consumer of its own process, in one row: their outbox rows as a JSON array, by
-- which whoever finds the row when its lease is over puts them into the queue, each for itself.
CREATE TABLE messaging_bundles (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,
    queue       TEXT    NOT NULL,
    outbox_refs TEXT    NOT NULL,
    enqueued_at INTEGER NOT NULL,
    lock_token  BLOB    NOT NULL,
    lease_until INTEGER NOT NULL
) STRICT;
