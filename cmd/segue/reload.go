// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/runstate"
)

// reloadPoll is how often reload looks for the result.
const reloadPoll = 20 * time.Millisecond

func newReload() *cobra.Command {
	var file string
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "reload -c FILE",
		Short: "Make a running balancer or agent read its configuration file again",
		Long: `Reload checks a configuration file, as "segue check --against" does. Then it sends SIGHUP to
the process that runs the instance which the file names, and waits for the result. It
prints why the process has refused the file. The earlier configuration is then still in
force.

The exit code is 0 if the file is in force. It is 1 if the file is invalid, if a change
needs a restart, if the process runs with another file, or if the process has refused the
file or does not answer within --timeout. Reload needs root, or the user of the process.`,
		Example: "  segue reload -c /etc/segue/lb.yaml",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if timeout <= 0 {
				return fmt.Errorf("--timeout %s: must be positive", timeout)
			}
			return reload(cmd, file, timeout)
		},
	}
	configFlag(cmd, &file)
	cmd.Flags().DurationVar(&timeout, "timeout", time.Minute, "wait at most so long for the result")
	return cmd
}

func reload(cmd *cobra.Command, file string, timeout time.Duration) error {
	instance, err := instanceIn(file)
	if err != nil {
		return err
	}
	if err := check(cmd, file, "", instance); err != nil {
		return err
	}
	process, err := runstate.FindProcess(instance)
	if err != nil {
		return err
	}
	if process == nil {
		return fmt.Errorf("instance %q has just ended", instance)
	}
	if err := requireFile(instance, process, file); err != nil {
		return err
	}
	asked := time.Now()
	if err := unix.Kill(process.PID, unix.SIGHUP); err != nil {
		return fmt.Errorf("send SIGHUP to process %d of instance %q: %w", process.PID, instance, err)
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
	defer cancel()
	if err := awaitReload(ctx, instance, process, asked); err != nil {
		return fmt.Errorf("instance %q: %w", instance, err)
	}
	_, err = fmt.Fprintf(cmd.OutOrStdout(), "instance %q has reloaded it\n", instance)
	return err
}

// instanceIn returns the instance that a configuration file names. It is empty if the file is
// invalid: check says why.
func instanceIn(file string) (string, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	role, _, err := guessRole(data)
	if err != nil {
		return "", nil
	}
	if role == "lab" {
		return "", fmt.Errorf("%s: is the topology of a lab, which no process reloads", file)
	}
	read, err := parseFor(role, data, filepath.Dir(file))
	if err != nil {
		return "", nil
	}
	return read.instance, nil
}

// requireFile returns an error if the process runs with another file, because it would reload that.
func requireFile(instance string, process *runstate.Process, file string) error {
	record, err := runstate.FindRecord(instance, process)
	if err != nil {
		return err
	}
	absolute, err := filepath.Abs(file)
	if err != nil {
		return err
	}
	if record == nil || record.Configuration.File == absolute {
		return nil
	}
	return fmt.Errorf("instance %q runs with %s, not with %s", instance, record.Configuration.File, absolute)
}

// awaitReload waits until a process has recorded the result of a reload that began after asked. The
// error says why the process has refused its file.
func awaitReload(ctx context.Context, instance string, process *runstate.Process, asked time.Time) error {
	tick := time.NewTicker(reloadPoll)
	defer tick.Stop()
	for {
		record, err := runstate.FindRecord(instance, process)
		if err != nil {
			return err
		}
		if record == nil {
			return errors.New("the process has ended during the reload")
		}
		if refused := record.Configuration.Refused; refused != nil && !refused.Time.Before(asked) {
			return fmt.Errorf("reload failed; the earlier configuration stays in force: %s",
				strings.Join(refused.Problems, "\n"))
		}
		if !record.Configuration.Read.Before(asked) {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("no result of the reload yet: %w", ctx.Err())
		case <-tick.C:
		}
	}
}
