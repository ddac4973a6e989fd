//! The operator's sections of the live picture: the server, its queues, its inboxes, the last audit, and the faults that
//! are armed.

use serde::Serialize;

use super::Operations;
use crate::http::live::Section;
use crate::http::probes::Probes;
use stockade_kernel::db::Bell;
use stockade_kernel::messaging::transport::Binding;
use stockade_kernel::messaging::transport::table::{HANDED_OVER, bell_of};
use stockade_kernel::messaging::{faults, inbox, outbox, pause};

/// The server as the dashboard's header shows it.
#[derive(Serialize)]
struct Server {
    #[serde(flatten)]
    health: serde_json::Value,
    /// Is the fault lab open?
    demo: bool,
    faults: faults::Armed,
}

pub fn sections(operations: &Operations, probes: &Probes, demo: bool) -> Vec<Section> {
    let (health, faults) = (probes.clone(), operations.kernel.faults.clone());
    let server = Section::shared("server", move || {
        let (probes, faults) = (health.clone(), faults.clone());
        async move { Ok(Server { health: probes.steady(true).await, demo, faults: faults.armed() }) }
    });
    let health = probes.clone();
    let for_tenants = Section::shared("server", move || {
        let probes = health.clone();
        async move { Ok(Server { health: probes.steady(false).await, demo, faults: faults::Armed::default() }) }
    })
    .for_tenants();
    let ours = operations.clone();
    let queues = Section::shared("queues", move || {
        let ours = ours.clone();
        async move {
            let bindings: Vec<&Binding> = ours.topology.queues.iter().collect();
            ours.look_at(&bindings).await
        }
    });
    let db = operations.kernel.db.clone();
    let inbox = Section::shared("inbox", move || {
        let db = db.clone();
        async move { Ok(inbox::tally(&mut db.read().await?).await?) }
    });
    let audits = operations.audits.clone();
    let audit = Section::shared("audit", move || {
        let audits = audits.clone();
        async move { Ok(audits.latest()) }
    });
    vec![server, for_tenants, queues, inbox, audit]
}

/// What rings when something moves.
pub fn bells(operations: &Operations) -> Vec<Bell> {
    let wakes = operations.kernel.db.wakes();
    let queues = operations.topology.queues.iter().map(|binding| bell_of(&binding.queue));
    let topics = queues.chain([HANDED_OVER, outbox::BELL, pause::BELL].map(str::to_owned));
    topics.map(|topic| wakes.bell(&topic)).collect()
}
