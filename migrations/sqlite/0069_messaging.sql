-- Queues found missing on the broker, recorded before they are declared: what they lost is still to be sent again. `id` is
-- new each time.
CREATE TABLE messaging_resyncs (
    queue TEXT NOT NULL PRIMARY KEY,
    id    BLOB NOT NULL
) STRICT, WITHOUT ROWID;
