// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/api"
	"github.com/segue-lb/segue/internal/atomicfile"
	"github.com/segue-lb/segue/internal/daemon"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/events"
	"github.com/segue-lb/segue/internal/fieldpath"
	"github.com/segue-lb/segue/internal/rundir"
)

// foreground is what the commands that run in the foreground have in common.
type foreground struct {
	hangups <-chan os.Signal
	// hidesPins tells whether the data path ends with the process: datapath.HidesPins before the
	// start, which mounts the BPF file system.
	hidesPins bool
	log       *slog.Logger
}

// detachCommand returns the command that detaches the data path when the process has ended. It is
// empty if the data path ends with the process.
func (f *foreground) detachCommand(role, instance string) string {
	if f.hidesPins {
		return ""
	}
	return "segue " + role + " detach " + instance
}

// runDaemon is the body of the commands that run in the foreground. It catches SIGHUP first,
// because a SIGHUP during the start would end the process.
func runDaemon(cmd *cobra.Command, run func(context.Context, *foreground) error) error {
	hangups, stop := daemon.CatchHangups()
	defer stop()
	format, _ := cmd.Flags().GetString(logFormat)
	log, err := newLog(cmd.ErrOrStderr(), format)
	if err != nil {
		return err
	}
	hidesPins := datapath.HidesPins()
	if hidesPins {
		log.Warn("/sys/fs/bpf is private to this process, as under ip netns exec: the data path ends with " +
			"the process, and segue status cannot see it; use nsenter --net= instead")
	}
	return run(cmd.Context(), &foreground{hangups, hidesPins, log})
}

// logFormat is the name of the flag for the format of the log.
const logFormat = "log-format"

// logFlag adds the flag for the format of the log.
func logFlag(cmd *cobra.Command) {
	cmd.Flags().String(logFormat, "text", "`format` of the log: text or json")
	_ = cmd.RegisterFlagCompletionFunc(logFormat,
		cobra.FixedCompletions([]string{"text", "json"}, cobra.ShellCompDirectiveNoFileComp))
}

// newLog returns a log in one of the two formats. Both show a value by the same text. So a duration
// is 10s, and not a number of nanoseconds.
func newLog(out io.Writer, format string) (*slog.Logger, error) {
	switch format {
	case "text":
		return slog.New(slog.NewTextHandler(out, nil)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(out, &slog.HandlerOptions{ReplaceAttr: textOf})), nil
	}
	return nil, fmt.Errorf("--%s %q: must be text or json", logFormat, format)
}

// textOf replaces a value that JSON would show in another form than text.
func textOf(_ []string, a slog.Attr) slog.Attr {
	switch value := a.Value.Any().(type) {
	case time.Time, slog.Level, error: // JSON shows them as text
	case fmt.Stringer:
		a.Value = slog.StringValue(value.String())
	}
	return a
}

// lockInstance is rundir.Lock for a process that will run the instance.
func lockInstance(name string) (*os.File, error) {
	lock, err := rundir.Lock(name)
	if errors.Is(err, rundir.ErrRunning) {
		err = fmt.Errorf("%w; another instance on this host needs another node.instance", err)
	}
	return lock, err
}

// unlockInstance ends the lock of a process. The file stays as long as the instance has a data path.
// If the instance has none, because its first start was refused, nobody would detach the instance, and
// so remove the file. Removing it is safe while it is locked: see rundir.Lock.
func unlockInstance(lock *os.File, instance string) {
	if _, err := os.Lstat(datapath.Dir(instance)); errors.Is(err, os.ErrNotExist) {
		_ = rundir.Unlock(lock) // it closes the lock in any case
		return
	}
	_ = lock.Close()
}

// removeLeft removes the temporary files of earlier processes of an instance that died while they
// replaced one of the files. An empty name is no file. The caller has the lock of the instance.
func removeLeft(log *slog.Logger, files ...string) {
	for _, file := range files {
		if file == "" {
			continue
		}
		if err := atomicfile.RemoveLeft(file); err != nil {
			log.Warn("a temporary file of an earlier process stays", "file", file, "error", err)
		}
	}
}

// logWarnings logs the warnings about a configuration.
func logWarnings(log *slog.Logger, warnings fieldpath.Errors) {
	for _, warning := range warnings {
		log.Warn("configuration", "warning", warning)
	}
}

// logInvalid logs the overrides that a start leaves out.
func logInvalid(log *slog.Logger, invalid []desired.InvalidOverride) {
	for _, o := range invalid {
		for _, problem := range o.Texts() {
			log.Error("an override is LEFT OUT, because it is invalid with the configuration file",
				"override", describeInvalid(&o.Override), "error", problem)
		}
	}
}

// tracked returns a reload whose result is also in the metrics, in the record of the process, and in
// the log or the events.
func tracked(
	metrics *daemon.Metrics, recorder *rundir.Recorder, stream *events.Stream, log *slog.Logger,
	reload api.Reload,
) api.Reload {
	return func(ctx context.Context) (warnings fieldpath.Errors, err error) {
		err = metrics.TrackReloads(recorder.TrackReloads(func(ctx context.Context) error {
			warnings, err = reload(ctx)
			return err
		}))(ctx)
		if err != nil {
			stream.Publish(events.Event{Kind: events.ReloadRefused, By: events.ActorOf(ctx), Reason: err.Error()})
			return nil, err
		}
		logWarnings(log, warnings)
		return warnings, nil
	}
}

// withoutWarnings returns a reload for SIGHUP, whose warnings only the log has.
func withoutWarnings(reload api.Reload) func(context.Context) error {
	return func(ctx context.Context) error {
		_, err := reload(events.WithActor(ctx, func() string { return events.Signal }))
		return err
	}
}
