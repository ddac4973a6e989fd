//! The last line of a test in which a process, a broker or a database died: all work finishes, and every invariant of the
//! audit holds.

use std::time::Duration;

use stockade::operations::audit::Checked;
use tokio::time::Instant;

use super::{DEADLINE, TestDb, eventually, settings};

/// Counts unfinished work. A published event without an inbox row of each consumer bound to it counts as well: that shows
/// a lost message, and stands in for the depths of a broker's queues. Copies, and messages on their way to a dead-letter
/// queue, are not counted on a broker.
pub async fn under_way(db: &TestDb) -> i64 {
    let left = "SELECT (SELECT COUNT(*) FROM messaging_queue) + (SELECT COUNT(*) FROM messaging_bundles)
         + (SELECT COUNT(*) FROM messaging_outbox WHERE status <> 'published')
         + (SELECT COUNT(*) FROM messaging_inbox WHERE state NOT IN ('processed', 'dead'))
         + (SELECT COUNT(*) FROM messaging_outbox o
             JOIN messaging_bindings b ON b.routing_key = o.aggregate_type || '.' || o.event_type
             WHERE o.kind = 'event' AND NOT EXISTS (SELECT 1 FROM messaging_inbox i
                 WHERE i.event_id = o.event_id AND b.queue LIKE '%.' || i.consumer))";
    db.count(left).await
}

/// Waits until nothing is under way. Fails when there has been no progress for [`DEADLINE`].
pub async fn until_finished(db: &TestDb) {
    let mut left = under_way(db).await;
    while left > 0 {
        let less = async || Some(under_way(db).await).filter(|now| *now < left);
        left = eventually(&format!("less than {left} under way"), less).await;
    }
}

pub async fn until_finished_and_audited(db: &TestDb) {
    until_finished(db).await;
    assert_audited(db).await;
}

/// Every invariant of the audit holds, with no grace for events on their way. On a broker a dead letter may be on its way
/// still when nothing is [`under_way`].
pub async fn assert_audited(db: &TestDb) {
    let began = Instant::now();
    let mut breaches = find_breaches(db).await;
    while !breaches.is_empty() && db.is_on_rabbit() && began.elapsed() < DEADLINE {
        tokio::time::sleep(Duration::from_millis(100)).await;
        breaches = find_breaches(db).await;
    }
    assert!(breaches.is_empty(), "{breaches:#?}");
}

async fn find_breaches(db: &TestDb) -> Vec<Checked> {
    let report = stockade::app::audit(settings(db, &[]), true).await.unwrap();
    report.checks.into_iter().filter(|check| check.violations > 0).collect()
}
