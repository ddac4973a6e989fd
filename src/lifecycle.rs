//! Signals, tracked tasks, and an orderly end.
//!
//! Tasks belong to stages, and a stage is stopped and waited for before the next: first the doors close (HTTP),
//! then the work in hand is finished (desk, consumers, office), then the relay sends what that work wrote, then
//! the helpers go. A task that ends unasked, by panic or by mistake, stops the whole process with a failing exit
//! code: a service that is half alive is worse than one that restarts.
//!
//! Requests and work have threads of their own: a batch in the middle of its transaction must not queue for a thread
//! behind a crowd of requests, while everybody else waits for the transaction.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// The order in which things stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    Http,
    Work,
    Relay,
    Helpers,
}

const STAGES: [Stage; 4] = [Stage::Http, Stage::Work, Stage::Relay, Stage::Helpers];

#[derive(Clone)]
pub struct Lifecycle {
    inner: Arc<Inner>,
}

struct Inner {
    /// Where everything but HTTP runs.
    workshop: Option<Runtime>,
    /// Cancelled when the process is to end, for whatever reason.
    ending: CancellationToken,
    failed: AtomicBool,
    stops: [CancellationToken; STAGES.len()],
    tasks: [TaskTracker; STAGES.len()],
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(workshop) = self.workshop.take() {
            workshop.shutdown_background();
        }
    }
}

impl Lifecycle {
    pub fn new() -> std::io::Result<Self> {
        let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
        let workshop = tokio::runtime::Builder::new_multi_thread()
            .worker_threads((cores / 2).max(2))
            .thread_name("stockade-work")
            .enable_all()
            .build()?;
        Ok(Self {
            inner: Arc::new(Inner {
                workshop: Some(workshop),
                ending: CancellationToken::new(),
                failed: AtomicBool::new(false),
                stops: Default::default(),
                tasks: Default::default(),
            }),
        })
    }

    /// Runs a task until its stage is stopped; `task` gets the token that says so.
    pub fn spawn<F: Future<Output = ()> + Send + 'static>(
        &self,
        stage: Stage,
        name: &'static str,
        task: impl FnOnce(CancellationToken) -> F,
    ) {
        let stop = self.inner.stops[stage as usize].clone();
        let watch = Watch { name, stop: stop.clone(), lifecycle: self.clone() };
        let task = task(stop);
        let watched = async move {
            let _watch = watch;
            task.await;
        };
        let tasks = &self.inner.tasks[stage as usize];
        match &self.inner.workshop {
            Some(workshop) if stage != Stage::Http => tasks.spawn_on(watched, workshop.handle()),
            _ => tasks.spawn(watched),
        };
    }

    /// Asks for an orderly end.
    pub fn end(&self) {
        self.inner.ending.cancel();
    }

    /// Resolves when an end has been asked for, or forced by a task that died.
    pub async fn ending(&self) {
        self.inner.ending.cancelled().await;
    }

    /// Stops stage after stage. `false` if a task failed or the time ran out first.
    pub async fn shut_down(&self, within: Duration) -> bool {
        let stages = async {
            for (stop, tasks) in self.inner.stops.iter().zip(&self.inner.tasks) {
                stop.cancel();
                tasks.close();
                tasks.wait().await;
            }
        };
        let in_time = tokio::time::timeout(within, stages).await.is_ok();
        if !in_time {
            tracing::error!(?within, "not everything stopped in time; what was in hand will be done again");
        }
        in_time && !self.inner.failed.load(Ordering::Relaxed)
    }
}

/// Notices a task that ends though nobody asked it to, even by a panic.
struct Watch {
    name: &'static str,
    stop: CancellationToken,
    lifecycle: Lifecycle,
}

impl Drop for Watch {
    fn drop(&mut self) {
        if !self.stop.is_cancelled() {
            tracing::error!(task = self.name, "the task {} ended unasked; stopping", self.name);
            self.lifecycle.inner.failed.store(true, Ordering::Relaxed);
            self.lifecycle.inner.ending.cancel();
        }
    }
}

/// Resolves at the first SIGINT or SIGTERM; a second one ends the process at once.
pub async fn asked_to_stop() -> std::io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    #[expect(clippy::disallowed_methods, reason = "must outlive every stage, to cut a shutdown short")]
    tokio::spawn(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        std::process::exit(130);
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn stages_stop_in_order() {
        let lifecycle = Lifecycle::new().unwrap();
        let (sender, mut stopped) = tokio::sync::mpsc::unbounded_channel();
        for (stage, name) in [(Stage::Relay, "relay"), (Stage::Http, "http"), (Stage::Work, "work")] {
            let sender = sender.clone();
            lifecycle.spawn(stage, name, |stop| async move {
                stop.cancelled().await;
                sender.send(name).unwrap();
            });
        }
        assert!(lifecycle.shut_down(Duration::from_secs(5)).await);
        drop(sender);
        let mut order = Vec::new();
        while let Some(name) = stopped.recv().await {
            order.push(name);
        }
        assert_eq!(order, ["http", "work", "relay"]);
    }

    #[tokio::test]
    async fn a_task_that_panics_ends_the_process_with_a_failure() {
        let lifecycle = Lifecycle::new().unwrap();
        lifecycle.spawn(Stage::Work, "doomed", |_| async { panic!("on purpose") });
        tokio::time::timeout(Duration::from_secs(30), lifecycle.ending()).await.unwrap();
        assert!(!lifecycle.shut_down(Duration::from_secs(30)).await);
    }
}
