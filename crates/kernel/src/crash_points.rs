//! One hook before and after every commit, publish and acknowledgement, for tests that let the process die there.
//!
//! Every path to these steps leads through a handful of functions, so a new call site needs no name: the file and line of
//! the call identify it. Without a hook a point costs one atomic load.

use std::fmt;
use std::panic::Location;
use std::sync::OnceLock;

/// A step that changes what others can see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    Commit,
    Publish,
    Acknowledge,
    Reject,
    Release,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    Before,
    After,
}

/// A place in the code that the process has reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Point {
    pub phase: Phase,
    pub step: Step,
    /// The line that called the step.
    pub site: &'static Location<'static>,
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {:?} {}:{}", self.phase, self.step, self.site.file(), self.site.line())
    }
}

type Hook = Box<dyn Fn(&Point) + Send + Sync>;

static HOOK: OnceLock<Hook> = OnceLock::new();

/// Calls `hook` at every point from now on, for the life of the process.
///
/// # Panics
/// If there is a hook already.
pub fn install(hook: impl Fn(&Point) + Send + Sync + 'static) {
    assert!(HOOK.set(Box::new(hook)).is_ok(), "a process has one hook");
}

/// Runs one step between its two points.
pub(crate) async fn around<T>(step: Step, site: &'static Location<'static>, work: impl Future<Output = T>) -> T {
    reach(Phase::Before, step, site);
    let done = work.await;
    reach(Phase::After, step, site);
    done
}

pub(crate) fn reach(phase: Phase, step: Step, site: &'static Location<'static>) {
    if let Some(hook) = HOOK.get() {
        hook(&Point { phase, step, site });
    }
}
