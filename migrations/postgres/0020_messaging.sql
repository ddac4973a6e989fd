-- Operating what was given up on, sending again what was published, and keeping the tables small.

-- The event a letter is about, if its body can be read: its inbox row is kept for as long as the letter is.
ALTER TABLE messaging_dead_letters ADD COLUMN event_id uuid;
ALTER TABLE messaging_dead_letters ADD COLUMN resolved_at timestamptz;
-- The redrive that sent it, if it was not sent by itself.
ALTER TABLE messaging_dead_letters ADD COLUMN job_id uuid;
UPDATE messaging_dead_letters SET event_id = message_id::uuid
    WHERE message_id ~* '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$';
UPDATE messaging_dead_letters SET resolved_at = updated_at WHERE state <> 'open';
CREATE INDEX messaging_dead_letters_event ON messaging_dead_letters (event_id, consumer);
CREATE INDEX messaging_dead_letters_resolved ON messaging_dead_letters (resolved_at) WHERE state <> 'open';
-- All that the groups are made of, so that no body is read to count them.
CREATE INDEX messaging_dead_letters_groups
    ON messaging_dead_letters (state, consumer, reason, event_type, queue, created_at, updated_at);

-- Who did what, when and why.
CREATE TABLE messaging_actions (
    id         uuid    NOT NULL PRIMARY KEY,
    who        text    NOT NULL,
    action     text    NOT NULL,
    subject    text    NOT NULL,
    why        text,
    details    text    NOT NULL,
    request_id text    NOT NULL,
    created_at timestamptz NOT NULL
);
CREATE INDEX messaging_actions_subject ON messaging_actions (subject, id);

-- Work that outlives a request: redrives and replays. A batch of it and its progress are one commit.
CREATE TABLE messaging_jobs (
    id              uuid    NOT NULL PRIMARY KEY,
    kind            text    NOT NULL CHECK (kind IN ('redrive', 'replay')),
    state           text    NOT NULL CHECK (state IN ('running', 'done', 'stopped', 'failed')),
    criteria        text    NOT NULL,
    rate            bigint NOT NULL CHECK (rate > 0),
    total           bigint NOT NULL,
    sent            bigint  NOT NULL DEFAULT 0,
    already_applied bigint  NOT NULL DEFAULT 0,
    skipped         bigint  NOT NULL DEFAULT 0,
    refused         bigint  NOT NULL DEFAULT 0,
    -- How far a replay has come.
    reached         uuid,
    next_at         timestamptz NOT NULL,
    who             text    NOT NULL,
    why             text,
    last_error      text,
    created_at      timestamptz NOT NULL,
    finished_at     timestamptz
);
CREATE INDEX messaging_jobs_running ON messaging_jobs (next_at) WHERE state = 'running';

-- What a redrive has still to do: the letters that were open when it was asked for.
CREATE TABLE messaging_job_letters (
    job_id    uuid NOT NULL,
    letter_id uuid NOT NULL,
    PRIMARY KEY (job_id, letter_id)
);

-- Events published long ago, out of the relay's way; replays read them too.
CREATE TABLE messaging_outbox_archive (
    id             uuid    NOT NULL PRIMARY KEY,
    group_id       text    NOT NULL,
    subsidiary_id  text,
    aggregate_type text    NOT NULL,
    aggregate_id   text    NOT NULL,
    event_type     text    NOT NULL,
    headers        text    NOT NULL,
    attempts       integer NOT NULL,
    created_at     timestamptz NOT NULL,
    published_at   timestamptz,
    correlation_id text    NOT NULL,
    causation_id   uuid,
    traceparent    text,
    body           bytea   NOT NULL
);
CREATE INDEX messaging_outbox_archive_aggregate ON messaging_outbox_archive (aggregate_type, aggregate_id);

-- Retries, redrives and replays by their event; a first publication is found by its id.
CREATE INDEX messaging_outbox_copies ON messaging_outbox (event_id) WHERE kind <> 'event';
-- Old rows are found by the time in their UUIDv7. Foreign ids may have none: only those are indexed by time, so that
-- our own pay nothing for it.
CREATE INDEX messaging_inbox_foreign ON messaging_inbox (finished_at) WHERE substr(event_id::text, 15, 1) <> '7';
