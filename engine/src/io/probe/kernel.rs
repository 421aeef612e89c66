//! The kernel, its ring and the limits of this process.

use std::ffi::CStr;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;

use super::{Finding, Needs};
use crate::io::NetEvent;
use crate::io::uring::{IoEvent, Reactor, RingConfig, RingError, now};

/// First kernel with everything the reactor needs and deferred completion work.
const KERNEL: (u32, u32) = (6, 1);

/// How long bytes may take over loopback before the ring counts as broken, in nanoseconds.
const PATIENCE: u64 = 2_000_000_000;

/// What the ring itself and the buffers of a shard may lock on kernels that still count it (before 5.12).
const MEMLOCK: u64 = 8 << 20;

pub(super) fn findings(data_dir: &Path, needs: Needs) -> Vec<Finding> {
    let memlock = limit(libc::RLIMIT_MEMLOCK);
    let mut findings = vec![kernel(&release())];
    // The directory has findings of its own; the ring is tried without it when it cannot be used.
    let anywhere = Path::new("/");
    let dir = if super::block_sizes(data_dir).is_ok() {
        data_dir
    } else {
        anywhere
    };
    match Reactor::new(&RingConfig::new(dir)) {
        Ok(reactor) => {
            findings.extend(ring(reactor));
            findings.push(memlock_finding(memlock));
        }
        Err(error) => findings.push(no_ring(&error, memlock)),
    }
    findings.push(descriptors(limit(libc::RLIMIT_NOFILE), needs.descriptors));
    findings.extend(governor());
    findings.extend(clock_source());
    findings
}

/// Release of the running kernel, as uname prints it.
#[must_use]
pub fn release() -> String {
    // SAFETY: all-zero is a valid `utsname`; on success the kernel put a NUL-terminated string into the field, and
    // on failure it is still all zero.
    unsafe {
        let mut name: libc::utsname = std::mem::zeroed();
        libc::uname(&raw mut name);
        CStr::from_ptr(name.release.as_ptr())
            .to_string_lossy()
            .into_owned()
    }
}

fn kernel(release: &str) -> Finding {
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .map(|number| number.parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version >= KERNEL {
        return Finding::ok("kernel", release.to_owned());
    }
    let fix = format!("use Linux {}.{} or newer", KERNEL.0, KERNEL.1);
    Finding::warn("kernel", release.to_owned(), fix)
}

fn no_ring(error: &RingError, memlock: u64) -> Finding {
    let sysctl = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").unwrap_or_default();
    let sysctl = match sysctl.trim() {
        "" => "not present",
        value => value,
    };
    let found = format!(
        "{error} (kernel.io_uring_disabled {sysctl}, RLIMIT_MEMLOCK {})",
        bytes_or_unlimited(memlock)
    );
    let fix = match error {
        RingError::Setup { errno: libc::ENOMEM } => {
            format!(
                "raise RLIMIT_MEMLOCK to {MEMLOCK} bytes per shard or more (systemd: LimitMEMLOCK=infinity)"
            )
        }
        RingError::Setup {
            errno: libc::EPERM | libc::EACCES,
        } if sysctl != "0" && sysctl != "not present" => "set sysctl kernel.io_uring_disabled=0".to_owned(),
        RingError::Setup {
            errno: libc::EPERM | libc::EACCES | libc::ENOSYS,
        } => "allow io_uring_setup, io_uring_enter and io_uring_register in the seccomp profile".to_owned(),
        _ => format!("use Linux {}.{} or newer", KERNEL.0, KERNEL.1),
    };
    Finding::fail("io_uring", found, fix)
}

/// One ring fits, as just seen; more of them, or larger buffers, may not.
fn memlock_finding(memlock: u64) -> Finding {
    let found = format!("RLIMIT_MEMLOCK {}", bytes_or_unlimited(memlock));
    if memlock >= MEMLOCK {
        return Finding::ok("memlock", found);
    }
    let fix = format!("raise it to {MEMLOCK} bytes per shard or more (systemd: LimitMEMLOCK=infinity)");
    Finding::warn("memlock", found, fix)
}

fn bytes_or_unlimited(limit: u64) -> String {
    if limit == libc::RLIM_INFINITY {
        "unlimited".to_owned()
    } else {
        format!("{limit} bytes")
    }
}

fn ring(mut reactor: Reactor) -> Vec<Finding> {
    let features = reactor.features();
    let optional = [
        (features.deferred, "DEFER_TASKRUN", "6.1"),
        (features.registered, "registered ring descriptor", "5.18"),
        (features.msg_ring, "MSG_RING", "5.18"),
        (features.ftruncate, "FTRUNCATE", "6.9"),
    ];
    let missing: Vec<String> = optional
        .iter()
        .filter(|(there, ..)| !there)
        .map(|(_, what, since)| format!("{what} (Linux {since})"))
        .collect();
    let features = if missing.is_empty() {
        Finding::ok("io_uring", "everything needed, everything optional".to_owned())
    } else {
        let found = format!("works, slower without {}", missing.join(", "));
        Finding::warn("io_uring", found, "use a newer kernel".to_owned())
    };
    let traffic = match loopback(&mut reactor) {
        Ok(()) => Finding::ok(
            "ring sockets",
            "multishot accept and receive deliver over loopback".to_owned(),
        ),
        Err(found) => Finding::fail(
            "ring sockets",
            found,
            format!(
                "use Linux {}.{} or newer, with a loopback interface",
                KERNEL.0, KERNEL.1
            ),
        ),
    };
    vec![features, traffic]
}

/// Sends some bytes to the ring over loopback.
fn loopback(reactor: &mut Reactor) -> Result<(), String> {
    const HELLO: &[u8] = b"ring";
    let text = |error: std::io::Error| error.to_string();
    let (_, addr) = reactor
        .listen(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
        .map_err(text)?;
    let mut stream = TcpStream::connect(addr).map_err(text)?;
    stream.write_all(HELLO).map_err(text)?;
    let until = now().mono.saturating_add(PATIENCE);
    let mut got = Vec::new();
    while got.len() < HELLO.len() {
        if now().mono >= until {
            return Err("bytes sent over loopback do not arrive".to_owned());
        }
        reactor
            .turn(Some(until), &mut |event| {
                if let IoEvent::Net(NetEvent::Received { data, .. }) = event {
                    got.extend_from_slice(data);
                }
            })
            .map_err(|error| error.to_string())?;
    }
    if got != HELLO {
        return Err("other bytes arrive over loopback than were sent".to_owned());
    }
    Ok(())
}

/// Soft limit of this process; unlimited when the kernel does not say.
fn limit(resource: libc::__rlimit_resource_t) -> u64 {
    let mut limit = libc::rlimit {
        rlim_cur: libc::RLIM_INFINITY,
        rlim_max: libc::RLIM_INFINITY,
    };
    // SAFETY: the structure lives across the call; on failure it keeps its values.
    unsafe { libc::getrlimit(resource, &raw mut limit) };
    limit.rlim_cur
}

/// Raises the soft limit of open files to the hard one, which needs no privilege; the limit that then holds.
///
/// # Errors
/// When the kernel refuses.
pub fn raise_descriptor_limit() -> std::io::Result<u64> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the structure lives across the call.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } < 0 {
        return Err(std::io::Error::last_os_error());
    }
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: as above; descriptors already open are not concerned.
    if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) } < 0 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(limit.rlim_cur)
}

fn descriptors(limit: u64, needed: u64) -> Finding {
    let found = format!("RLIMIT_NOFILE {limit}, {needed} needed");
    if limit >= needed {
        return Finding::ok("open files", found);
    }
    let fix = format!("raise it to {needed} or more (ulimit -n, systemd: LimitNOFILE={needed})");
    Finding::warn("open files", found, fix)
}

fn governor() -> Option<Finding> {
    let path = "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor";
    let governor = std::fs::read_to_string(path).ok()?.trim().to_owned();
    Some(if governor == "performance" {
        Finding::ok("cpu governor", governor)
    } else {
        let fix =
            "set it to performance on all CPUs for steady latencies (cpupower frequency-set -g performance)";
        Finding::warn("cpu governor", governor, fix.to_owned())
    })
}

fn clock_source() -> Option<Finding> {
    let path = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    let source = std::fs::read_to_string(path).ok()?.trim().to_owned();
    Some(match source.as_str() {
        "hpet" | "acpi_pm" | "jiffies" => Finding::warn(
            "clock source",
            source,
            "reading it costs a system call; boot with clocksource=tsc if the CPU's is stable".to_owned(),
        ),
        _ => Finding::ok("clock source", source),
    })
}

#[cfg(test)]
mod tests {
    use super::super::{Verdict, examine, worst};
    use super::*;

    #[test]
    fn this_host_can_run_the_reactor() {
        let dir = tempfile::TempDir::new().unwrap();
        let findings = examine(dir.path(), Needs { descriptors: 64 });
        assert!(worst(&findings) < Verdict::Fail, "{findings:#?}");
        for name in ["kernel", "io_uring", "ring sockets", "open files", "file system"] {
            assert!(findings.iter().any(|finding| finding.name == name), "{name}");
        }
    }

    #[test]
    fn kernel_versions_compare_by_number() {
        for (release, verdict) in [
            ("6.18.44-fc-v1045", Verdict::Ok),
            ("6.1.0", Verdict::Ok),
            ("10.0", Verdict::Ok),
            ("6.0.19", Verdict::Warn),
            ("5.15.0-91-generic", Verdict::Warn),
            ("", Verdict::Warn),
        ] {
            assert_eq!(kernel(release).verdict, verdict, "{release}");
        }
    }

    #[test]
    fn a_refused_ring_says_what_to_change() {
        let fix = |errno| {
            let finding = no_ring(&RingError::Setup { errno }, 65536);
            assert_eq!(finding.verdict, Verdict::Fail);
            assert!(
                finding.found.contains("RLIMIT_MEMLOCK 65536 bytes"),
                "{finding:?}"
            );
            finding.fix
        };
        assert!(fix(libc::ENOMEM).contains("LimitMEMLOCK"));
        assert!(fix(libc::ENOSYS).contains("seccomp"));
        assert!(fix(libc::EINVAL).contains("Linux 6.1"));
    }

    #[test]
    fn the_soft_limit_rises_to_the_hard_one() {
        let before = limit(libc::RLIMIT_NOFILE);
        let after = raise_descriptor_limit().unwrap();
        assert!(after >= before);
        assert_eq!(limit(libc::RLIMIT_NOFILE), after);
    }

    #[test]
    fn too_few_descriptors_are_a_warning_with_a_number() {
        assert_eq!(descriptors(1024, 1024).verdict, Verdict::Ok);
        let finding = descriptors(1024, 25_000);
        assert_eq!(finding.verdict, Verdict::Warn);
        assert!(finding.fix.contains("25000"));
    }
}
