//! What a figure was measured on: kernel, processor, file system, device. Printed with every result.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::Serialize;

/// The machine below a data directory, as far as the kernel tells; unknown parts are "unknown".
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Host {
    /// Release of the kernel.
    pub kernel: String,
    /// Model of the processor.
    pub cpu: String,
    /// Logical processors.
    pub cpus: usize,
    /// File system of the data directory and its mount options.
    pub file_system: String,
    /// Block device below it, with its I/O scheduler and write cache.
    pub device: String,
    /// How durable writes are made.
    pub sync_mode: String,
}

impl Host {
    /// Looks at the machine below `dir`.
    #[must_use]
    pub fn of(dir: &Path) -> Host {
        let mount = mount_of(dir);
        Host {
            kernel: line("/proc/sys/kernel/osrelease"),
            cpu: cpu_model(),
            cpus: cpus(),
            file_system: mount
                .as_ref()
                .map_or_else(unknown, |m| format!("{} ({})", m.kind, m.options)),
            device: mount.map_or_else(unknown, |m| device(&m)),
            sync_mode: "O_DIRECT|O_DSYNC journal".into(),
        }
    }

    /// The lines of a table's head.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        vec![
            format!("kernel {}, {} x {}", self.kernel, self.cpus, self.cpu),
            format!("file system {}", self.file_system),
            format!("device {}, {}", self.device, self.sync_mode),
        ]
    }
}

struct Mount {
    device: String,
    source: String,
    kind: String,
    options: String,
}

/// The mount that holds `dir`: the one of its device number.
fn mount_of(dir: &Path) -> Option<Mount> {
    let dev = fs::metadata(dir).ok()?.dev();
    let device = format!("{}:{}", libc::major(dev), libc::minor(dev));
    let table = fs::read_to_string("/proc/self/mountinfo").ok()?;
    // 36 35 98:0 /root /point options optional... - kind source super-options
    table.lines().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        (left.split(' ').nth(2)? == device).then_some(())?;
        let mut right = right.split(' ');
        Some(Mount {
            kind: right.next()?.to_string(),
            source: right.next()?.to_string(),
            options: right.next()?.to_string(),
            device: device.clone(),
        })
    })
}

fn device(mount: &Mount) -> String {
    let queue = |name: &str| {
        let own = format!("/sys/dev/block/{}/queue/{name}", mount.device);
        let parent = format!("/sys/dev/block/{}/../queue/{name}", mount.device);
        fs::read_to_string(own)
            .or_else(|_| fs::read_to_string(parent))
            .ok()
    };
    let Some(cache) = queue("write_cache") else {
        return mount.source.clone();
    };
    let scheduler = queue("scheduler").unwrap_or_default();
    // The one in use stands in brackets: "[none] mq-deadline".
    let scheduler = scheduler
        .split_once('[')
        .and_then(|(_, rest)| rest.split_once(']'))
        .map_or("?", |(name, _)| name);
    format!("{} (scheduler {scheduler}, {})", mount.source, cache.trim())
}

/// Logical processors, whatever this thread is pinned to.
#[must_use]
pub fn cpus() -> usize {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    info.lines().filter(|line| line.starts_with("processor")).count()
}

fn cpu_model() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    model.map_or_else(unknown, |(_, name)| name.trim().to_string())
}

fn line(path: &str) -> String {
    fs::read_to_string(path).map_or_else(|_| unknown(), |text| text.trim().to_string())
}

fn unknown() -> String {
    "unknown".into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_is_described() {
        let host = Host::of(Path::new("/proc"));
        assert!(host.kernel.contains('.'), "{host:?}");
        assert!(host.file_system.starts_with("proc"), "{host:?}");
        assert!(host.cpus > 0);
    }
}
