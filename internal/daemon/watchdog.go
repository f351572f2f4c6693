// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"log/slog"
	"os"
	"strconv"
	"time"
)

// watchdogInterval returns the time between two checks of the service: a quarter of the time after
// which the service manager ends a process that does not notify it. If the service manager never
// does that, the result is 0. See sd_watchdog_enabled(3).
func watchdogInterval() time.Duration {
	if pid := os.Getenv("WATCHDOG_PID"); pid != "" && pid != strconv.Itoa(os.Getpid()) {
		return 0
	}
	limit, err := strconv.ParseUint(os.Getenv("WATCHDOG_USEC"), 10, 63)
	if err != nil {
		return 0
	}
	return time.Duration(limit) * time.Microsecond / 4
}

// feedWatchdog checks the service after each interval, until the context ends. If the service has
// made a step since the last check, feedWatchdog tells the service manager that the service is
// alive. The service manager restarts a stuck process. The data path works meanwhile.
func feedWatchdog(ctx context.Context, service Service, interval time.Duration, log *slog.Logger) {
	if interval <= 0 {
		return
	}
	tick := time.NewTicker(interval)
	defer tick.Stop()
	last := service.Steps()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		steps := service.Steps()
		if steps == last {
			continue
		}
		last = steps
		if err := Notify("WATCHDOG=1"); err != nil {
			log.Warn("cannot notify the service manager", "error", err)
		}
	}
}
