//! The last line of a test in which a process, a broker or a database died: all work finishes, and every invariant of the
//! audit holds.

use stockade::operations::audit::Checked;

use super::{TestDb, eventually, settings};

/// How much is left to do: each published event must have an inbox row of every consumer that is bound to it. That shows
/// an event that a queue has lost, and stands in for the queues of a broker, which cannot be counted from here.
pub async fn under_way(db: &TestDb) -> i64 {
    let left = "SELECT (SELECT COUNT(*) FROM messaging_queue) + (SELECT COUNT(*) FROM messaging_bundles)
         + (SELECT COUNT(*) FROM messaging_outbox WHERE status <> 'published')
         + (SELECT COUNT(*) FROM messaging_inbox WHERE state NOT IN ('processed', 'dead'))
         + (SELECT COUNT(*) FROM messaging_outbox o
             JOIN messaging_bound b ON b.routing_key = o.aggregate_type || '.' || o.event_type
             WHERE o.kind = 'event' AND NOT EXISTS (SELECT 1 FROM messaging_inbox i
                 WHERE i.event_id = o.event_id AND b.queue LIKE '%.' || i.consumer))";
    db.count(left).await
}

/// Waits until nothing is under way any more, for as long as there is progress.
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

/// Every invariant of the audit holds, with no grace for events on their way.
pub async fn assert_audited(db: &TestDb) {
    let breaches = breaches(db).await;
    assert!(breaches.is_empty(), "{breaches:#?}");
}

pub async fn breaches(db: &TestDb) -> Vec<Checked> {
    let report = stockade::app::audit(settings(db, &[]), true).await.unwrap();
    report.checks.into_iter().filter(|check| check.violations > 0).collect()
}
