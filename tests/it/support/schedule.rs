//! Decides when a test may run, and records how long it took.
//!
//! Most tests wait for something, so libtest starts all of them, each on a thread of its own, and the tests queue here.
//! A queued test holds no slot: while one waits for a breakable broker, another runs.
//!
//! Async tests get here through `#[tokio::test(crate = "crate::support::schedule")]`, whose expansion uses
//! [`runtime::Builder`] and [`pin`] below; tests without a runtime that start processes call [`enter`].

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::{Condvar, LazyLock, Mutex};
use std::time::Instant;

pub use tokio::pin;

/// Tests that run at the same time.
const SLOTS: usize = 8;

/// Tests whose path begins with one of these share a limit of their own. They are the long ones, so they need no slot:
/// within their limit they start before all others.
const LIMITS: &[(&[&str], usize)] = &[
    // The longest test of all, almost all of it in one thread of Python.
    (&["contract::"], 1),
    // Four of them kill a server a hundred times each. One at a time, they are longer than all other tests together.
    (&["crashes::everywhere::"], 4),
    // Each has a Chromium, which uses both cores while it loads a page.
    (&["dashboard::"], 1),
    // They measure throughput, or run several servers at full speed.
    (&["bench::", "demos::", "chaos::", "arrival::"], 1),
    // Each has a broker of its own to break, `rabbit::faulty`, which takes both cores while it starts again.
    (
        &[
            "crashes::brokers::",
            "crashes::broker_limits::",
            "http::probes::probes_answer_within_a_second_though_the_broker",
            "http::timeline::a_broker_that_is_away_or_blocked",
            "rabbit::a_message_that_the_broker_will_not_have",
        ],
        2,
    ),
];

struct Running {
    all: usize,
    limited: [usize; LIMITS.len()],
}

static RUNNING: Mutex<Running> = Mutex::new(Running { all: 0, limited: [0; LIMITS.len()] });
static ONE_ENDED: Condvar = Condvar::new();

/// Appended to: `scripts/test` removes it first, and lists the slowest afterwards.
static TIMES: LazyLock<Mutex<File>> = LazyLock::new(|| {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("test-times");
    Mutex::new(File::options().create(true).append(true).open(path).unwrap())
});

/// A place among the running tests, given up on drop.
pub struct Slot {
    test: String,
    limit: Option<usize>,
    began: Instant,
}

/// Waits until this thread's test may run.
pub fn enter() -> Slot {
    let test = std::thread::current().name().unwrap_or_default().to_owned();
    let limit = LIMITS.iter().position(|(prefixes, _)| prefixes.iter().any(|prefix| test.starts_with(prefix)));
    let has_room = |running: &Running| match limit {
        Some(index) => running.limited[index] < LIMITS[index].1,
        None => running.all < SLOTS,
    };
    let mut running = ONE_ENDED.wait_while(RUNNING.lock().unwrap(), |running| !has_room(running)).unwrap();
    running.all += 1;
    if let Some(index) = limit {
        running.limited[index] += 1;
    }
    Slot { test, limit, began: Instant::now() }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut running = RUNNING.lock().unwrap();
        running.all -= 1;
        if let Some(index) = self.limit {
            running.limited[index] -= 1;
        }
        drop(running);
        ONE_ENDED.notify_all();
        let line = format!("{:.3}\t{}\n", self.began.elapsed().as_secs_f64(), self.test);
        TIMES.lock().unwrap().write_all(line.as_bytes()).unwrap();
    }
}

/// The part of `tokio::runtime` that the test attribute uses.
pub mod runtime {
    use std::io;

    use tokio::runtime;

    pub struct Builder(runtime::Builder);

    /// Built when its test may run: a queued test needs no more than its thread.
    pub struct Runtime(runtime::Builder);

    impl Builder {
        pub fn new_current_thread() -> Self {
            Self(runtime::Builder::new_current_thread())
        }

        pub fn new_multi_thread() -> Self {
            Self(runtime::Builder::new_multi_thread())
        }

        pub fn worker_threads(mut self, count: usize) -> Self {
            self.0.worker_threads(count);
            self
        }

        pub fn enable_all(mut self) -> Self {
            self.0.enable_all();
            self
        }

        pub fn build(self) -> io::Result<Runtime> {
            Ok(Runtime(self.0))
        }
    }

    impl Runtime {
        pub fn block_on<F: Future>(mut self, test: F) -> F::Output {
            let _slot = super::enter();
            self.0.build().unwrap().block_on(test)
        }
    }
}
