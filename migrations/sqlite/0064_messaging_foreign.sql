-- Whether an id is foreign is asked of every inbox row that is written, so by its bytes, without spelling it out.
DROP INDEX messaging_inbox_foreign;
CREATE INDEX messaging_inbox_foreign ON messaging_inbox (finished_at) WHERE substr(event_id, 7, 1) NOT BETWEEN x'70' AND x'7f';
