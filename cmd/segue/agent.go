// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/segue-lb/segue/internal/agent"
	"github.com/segue-lb/segue/internal/api"
	"github.com/segue-lb/segue/internal/control"
	"github.com/segue-lb/segue/internal/daemon"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/events"
	"github.com/segue-lb/segue/internal/rundir"
	"github.com/segue-lb/segue/internal/version"
)

func newAgent() *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "agent -c FILE",
		Short: "Run the agent of a server",
		Long: `Run the agent of a server in the foreground.

On SIGHUP the agent reads its configuration and its overrides again. It refuses an
invalid file and keeps the running configuration. When the process ends, the data path
stays in the kernel and keeps delivering packets. The next start takes the data path
over without losing a packet. "segue agent detach" removes the data path.`,
		Example: "  segue agent -c /etc/segue/agent.yaml",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runDaemon(cmd, func(ctx context.Context, f *foreground) error {
				return runAgent(ctx, file, f)
			})
		},
	}
	keptFileFlag(cmd, &file)
	logFlag(cmd)
	cmd.AddCommand(newDetach(datapath.RoleAgent, agent.Detach))
	return cmd
}

// runAgent runs an agent until the context ends.
func runAgent(ctx context.Context, file string, f *foreground) error {
	log := f.log
	controller, warnings, err := control.LoadAgent(file)
	if err != nil {
		return err
	}
	cfg := controller.Desired()
	logWarnings(log, warnings)
	logInvalid(log, controller.Invalid())
	lock, err := lockInstance(cfg.Node.Instance)
	if err != nil {
		return err
	}
	defer unlockInstance(lock, cfg.Node.Instance)
	removeLeft(log, rundir.RecordFile(cfg.Node.Instance), cfg.OverridesFile())
	metrics, err := daemon.ListenMetrics(cfg.Metrics.Listen, "segue_agent", log)
	if err != nil {
		return err
	}
	defer metrics.Close()
	socket, err := api.Listen(cfg.Node.Instance, cfg.API.Group, log)
	if err != nil {
		return err
	}
	defer socket.Close()
	a, err := agent.New(cfg, controller.Secrets(), log)
	if err != nil {
		return err
	}
	defer a.Close()
	metrics.MustRegister(a)
	recorder := rundir.NewRecorder(lock, string(datapath.RoleAgent), file, cfg.Fixed(), log)
	defer recorder.Close()
	stream := events.NewStream()
	stream.Publish(events.Event{Kind: events.Started, Reason: "version " + version.String()})
	a.PublishTo(stream)
	controller.Attach(a, recorder.SetOverrides)
	reload := tracked(metrics, recorder, stream, log, controller.Reload)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return metrics.Run(ctx) })
	group.Go(func() error {
		// Served once the agent runs: earlier requests for changes would have to wait.
		select {
		case <-a.Ready():
			return serveAgentAPI(ctx, socket, api.Agent{Control: controller, Reload: reload, Events: stream})
		case <-ctx.Done():
			return nil
		}
	})
	group.Go(func() error {
		detach := f.detachCommand("agent", cfg.Node.Instance)
		return daemon.Serve(ctx, a, reloadBySignal(reload), f.hangups, detach, log)
	})
	return group.Wait()
}

// serveAgentAPI answers the requests of the API until the context ends. It reads the state of the
// services from the tables of the data path.
func serveAgentAPI(ctx context.Context, socket *api.Socket, serving api.Agent) error {
	view, err := agent.OpenView(serving.Control.Desired().Node.Instance)
	if err != nil {
		return err
	}
	defer view.Close()
	serving.Source = view.Snapshot
	return socket.Run(ctx, serving.Handler())
}
