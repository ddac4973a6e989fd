-- Operating what was given up on, sending again what was published, and keeping the tables small.

-- The event a letter is about, if its body can be read: its inbox row is kept for as long as the letter is.
ALTER TABLE messaging_dead_letters ADD COLUMN event_id BLOB;
ALTER TABLE messaging_dead_letters ADD COLUMN resolved_at INTEGER;
-- The redrive that sent it, if it was not sent by itself.
ALTER TABLE messaging_dead_letters ADD COLUMN job_id BLOB;
UPDATE messaging_dead_letters SET event_id = unhex(message_id, '-') WHERE length(unhex(message_id, '-')) = 16;
UPDATE messaging_dead_letters SET resolved_at = updated_at WHERE state <> 'open';
CREATE INDEX messaging_dead_letters_event ON messaging_dead_letters (event_id, consumer);
CREATE INDEX messaging_dead_letters_resolved ON messaging_dead_letters (resolved_at) WHERE state <> 'open';
-- All that the groups are made of, so that no body is read to count them.
CREATE INDEX messaging_dead_letters_groups
    ON messaging_dead_letters (state, consumer, reason, event_type, queue, created_at, updated_at);

-- Who did what, when and why.
CREATE TABLE messaging_actions (
    id         BLOB    NOT NULL PRIMARY KEY,
    who        TEXT    NOT NULL,
    action     TEXT    NOT NULL,
    subject    TEXT    NOT NULL,
    why        TEXT,
    details    TEXT    NOT NULL,
    request_id TEXT    NOT NULL,
    created_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX messaging_actions_subject ON messaging_actions (subject, id);

-- Work that outlives a request: redrives and replays. A batch of it and its progress are one commit.
CREATE TABLE messaging_jobs (
    id              BLOB    NOT NULL PRIMARY KEY,
    kind            TEXT    NOT NULL CHECK (kind IN ('redrive', 'replay')),
    state           TEXT    NOT NULL CHECK (state IN ('running', 'done', 'stopped', 'failed')),
    criteria        TEXT    NOT NULL,
    rate            INTEGER NOT NULL CHECK (rate > 0),
    total           INTEGER NOT NULL,
    sent            INTEGER NOT NULL DEFAULT 0,
    already_applied INTEGER NOT NULL DEFAULT 0,
    skipped         INTEGER NOT NULL DEFAULT 0,
    refused         INTEGER NOT NULL DEFAULT 0,
    -- How far a replay has come.
    reached         BLOB,
    next_at         INTEGER NOT NULL,
    who             TEXT    NOT NULL,
    why             TEXT,
    last_error      TEXT,
    created_at      INTEGER NOT NULL,
    finished_at     INTEGER
) STRICT, WITHOUT ROWID;
CREATE INDEX messaging_jobs_running ON messaging_jobs (next_at) WHERE state = 'running';

-- What a redrive has still to do: the letters that were open when it was asked for.
CREATE TABLE messaging_job_letters (
    job_id    BLOB NOT NULL,
    letter_id BLOB NOT NULL,
    PRIMARY KEY (job_id, letter_id)
) STRICT, WITHOUT ROWID;

-- Events published long ago, out of the relay's way; replays read them too.
CREATE TABLE messaging_outbox_archive (
    id             BLOB    NOT NULL PRIMARY KEY,
    group_id       TEXT    NOT NULL,
    subsidiary_id  TEXT,
    aggregate_type TEXT    NOT NULL,
    aggregate_id   TEXT    NOT NULL,
    event_type     TEXT    NOT NULL,
    headers        TEXT    NOT NULL,
    attempts       INTEGER NOT NULL,
    created_at     INTEGER NOT NULL,
    published_at   INTEGER,
    correlation_id TEXT    NOT NULL,
    causation_id   BLOB,
    traceparent    TEXT,
    body           BLOB    NOT NULL
) STRICT;
CREATE INDEX messaging_outbox_archive_aggregate ON messaging_outbox_archive (aggregate_type, aggregate_id);

-- Retries, redrives and replays by their event; a first publication is found by its id.
CREATE INDEX messaging_outbox_copies ON messaging_outbox (event_id) WHERE kind <> 'event';
-- Old rows are found by the time in their UUIDv7. Foreign ids may have none: only those are indexed by time, so that
-- our own pay nothing for it.
CREATE INDEX messaging_inbox_foreign ON messaging_inbox (finished_at) WHERE substr(hex(event_id), 13, 1) <> '7';
