// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/user"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/segue-lb/segue/internal/api"
	"github.com/segue-lb/segue/internal/balancer"
	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/control"
	"github.com/segue-lb/segue/internal/daemon"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/nexthop"
	"github.com/segue-lb/segue/internal/runstate"
)

func newLB() *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "lb -c FILE",
		Short: "Run a balancer",
		Long: `Run a balancer in the foreground.

On SIGHUP the balancer reads its configuration and its overrides again. It refuses
an invalid file and keeps the running configuration. When the process ends, the data
path stays in the kernel and keeps forwarding packets. The next start takes the data
path over without losing a packet. "segue lb detach" removes the data path.`,
		Example: "  segue lb -c /etc/segue/lb.yaml",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runDaemon(cmd, func(ctx context.Context, f *foreground) error {
				return runLB(ctx, file, f)
			})
		},
	}
	configFlag(cmd, &file)
	cmd.AddCommand(newDetach(datapath.RoleBalancer, detachLB))
	return cmd
}

func runLB(ctx context.Context, file string, f *foreground) error {
	log := f.log
	controller, warnings, err := control.Load(file)
	if err != nil {
		return err
	}
	cfg := controller.Desired()
	logWarnings(log, warnings)
	lock, err := lockInstance(cfg.Node.Instance)
	if err != nil {
		return err
	}
	defer lock.Close()
	metrics, err := daemon.ListenMetrics(cfg.Metrics.Listen, "segue_lb", log)
	if err != nil {
		return err
	}
	defer metrics.Close()
	socket, err := api.Listen(cfg.Node.Instance, socketGroup(cfg.API.Group), log)
	if err != nil {
		return err
	}
	defer socket.Close()
	b, err := balancer.New(cfg, log)
	if err != nil {
		return err
	}
	defer b.Close()
	collector, err := b.Collector()
	if err != nil {
		return err
	}
	defer collector.Close()
	metrics.MustRegister(collector, b.Polls())
	view, err := b.View()
	if err != nil {
		return err
	}
	defer view.Close()
	recorder := runstate.NewRecorder(lock, string(datapath.RoleBalancer), file, cfg.Fixed(), log)
	defer recorder.Close()
	controller.Attach(b, recorder.SetOverrides)
	reload := metrics.TrackReloads(recorder.TrackReloads(func(ctx context.Context) error {
		warnings, err := controller.Reload(ctx)
		if err == nil {
			logWarnings(log, warnings)
		}
		return err
	}))
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return metrics.Run(ctx) })
	group.Go(func() error {
		select { // before, a change would wait for the balancer to run
		case <-b.Ready():
			return socket.Run(ctx, controller, view.Snapshot)
		case <-ctx.Done():
			return nil
		}
	})
	group.Go(func() error {
		return daemon.Serve(ctx, b, reload, f.hangups, f.detachCommand("lb", cfg.Node.Instance), log)
	})
	return group.Wait()
}

// socketGroup returns the group that may use the socket. Only root can give the socket to the group
// of root, which api.Listen does without a group. A balancer of another user keeps it in its own.
func socketGroup(configured string) string {
	if configured != "" || os.Geteuid() == 0 {
		return configured
	}
	own, err := user.LookupGroupId(strconv.Itoa(os.Getegid()))
	if err != nil {
		return "" // then api.Listen reports that it may not use the group of root
	}
	return own.Name
}

// detachLB also releases the neighbour entries that a killed process left managed.
func detachLB(instance string) error {
	return errors.Join(dataplane.Detach(instance), nexthop.GiveBack())
}

// newDetach returns the command that removes the data path of an instance.
func newDetach(role datapath.Role, detach func(instance string) error) *cobra.Command {
	command := "agent"
	if role == datapath.RoleBalancer {
		command = "lb"
	}
	return &cobra.Command{
		Use:     "detach INSTANCE",
		Short:   "Remove the data path of a stopped " + string(role) + " from the kernel",
		Example: fmt.Sprintf("  segue %[1]s detach %[1]s", command),
		Args:    arguments("INSTANCE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			instance := args[0]
			if err := datapath.CheckRole(instance, role); err != nil {
				return err
			}
			lock, err := runstate.Lock(instance)
			if err != nil {
				return fmt.Errorf("stop the process first: %w", err)
			}
			attachments, unreadable := datapath.ReadAttachments(instance)
			if err := detach(instance); err != nil {
				_ = lock.Close()
				return err
			}
			if err := runstate.Unlock(lock); err != nil {
				return err
			}
			from := describeDetached(attachments)
			if unreadable != nil {
				from = fmt.Sprintf("; its interfaces are unknown (%v)", unreadable)
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "Detached %s %q%s.\n", role, instance, from)
			return err
		},
	}
}

// describeDetached names the interfaces from which an instance was detached.
func describeDetached(attachments []*datapath.Attachment) string {
	if len(attachments) == 0 {
		return ", which was not attached to an interface"
	}
	names := make([]string, len(attachments))
	for i, a := range attachments {
		names[i] = interfaceName(a.Interface, a.Ifindex)
		if a.Interface == "" {
			names[i] += " in another network namespace"
		}
	}
	return " from " + strings.Join(names, " and ")
}
