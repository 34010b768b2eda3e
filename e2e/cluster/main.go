// Command controlplane is every Kubernetes component of the local cluster in one
// binary: etcd, kube-apiserver, kube-controller-manager, kube-scheduler, kubelet,
// kubectl, helm, kstatus (kstatus.go), and the streaming half of the process runtime (stream.go).
//
// The component is the first argument, or the name of the symlink it is called by.
// Run one process per component: each one's constructor installs signal handlers
// and feature gates that are global to its process, and panics the second time.
package main

import (
	"context"
	"flag"
	"fmt"
	"net/url"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	_ "time/tzdata" // CronJob time zones, without /usr/share/zoneinfo

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/embed"
	helm "helm.sh/helm/v4/pkg/cmd"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	kcm "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// cobraCommands holds constructors, not commands: only the chosen one may run.
var cobraCommands = map[string]func() *cobra.Command{
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": kcm.NewControllerManagerCommand,
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
	"kubectl":                 func() *cobra.Command { return kubectl.NewDefaultKubectlCommand() },
	"helm":                    helmCommand,
}

// plainCommands parse their own flags.
var plainCommands = map[string]func(args []string) error{"etcd": runEtcd, "stream": runStream, "kstatus": runKstatus}

func main() {
	name, args := filepath.Base(os.Args[0]), os.Args[1:]
	if cobraCommands[name] == nil && plainCommands[name] == nil && len(args) > 0 {
		name, args = args[0], args[1:]
	}
	if newCommand, ok := cobraCommands[name]; ok {
		os.Args = append([]string{name}, args...)
		os.Exit(cli.Run(newCommand()))
	}
	run, ok := plainCommands[name]
	if !ok {
		fmt.Fprintln(os.Stderr, "usage: controlplane {etcd|kube-apiserver|kube-controller-manager|kube-scheduler|kubelet|kubectl|helm|stream|kstatus} [flags]")
		os.Exit(2)
	}
	if err := run(args); err != nil {
		fmt.Fprintln(os.Stderr, name+":", err)
		os.Exit(1)
	}
}

// untilStopped returns when the process is asked to stop, or with the first failure.
func untilStopped(failed <-chan error) error {
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
	select {
	case <-stop:
		return nil
	case err := <-failed:
		return err
	}
}

func runEtcd(args []string) error {
	flags := flag.NewFlagSet("etcd", flag.ExitOnError)
	dir := flags.String("data-dir", "", "where the database lives")
	client := flags.String("client-url", "https://127.0.0.1:2379", "URL for the API server")
	peer := flags.String("peer-url", "http://127.0.0.1:2380", "URL for other members; there are none")
	cert := flags.String("cert", "", "serving certificate")
	key := flags.String("key", "", "its key")
	ca := flags.String("ca", "", "certificate authority of the clients")
	noFsync := flags.Bool("unsafe-no-fsync", false, "trade durability for speed; for tests")
	flags.Parse(args)

	clientURL, err := url.Parse(*client)
	if err != nil {
		return err
	}
	peerURL, err := url.Parse(*peer)
	if err != nil {
		return err
	}
	config := embed.NewConfig()
	config.Dir, config.LogLevel, config.UnsafeNoFsync = *dir, "warn", *noFsync
	config.ListenClientUrls, config.AdvertiseClientUrls = []url.URL{*clientURL}, []url.URL{*clientURL}
	config.ListenPeerUrls, config.AdvertisePeerUrls = []url.URL{*peerURL}, []url.URL{*peerURL}
	config.InitialCluster = config.Name + "=" + *peer
	config.QuotaBackendBytes = 4 << 30
	config.WarningUnaryRequestDuration = embed.DefaultWarningUnaryRequestDuration // zero would log every request
	config.AutoCompactionMode, config.AutoCompactionRetention = "periodic", "5m"
	config.ClientTLSInfo.CertFile, config.ClientTLSInfo.KeyFile = *cert, *key
	config.ClientTLSInfo.TrustedCAFile, config.ClientTLSInfo.ClientCertAuth = *ca, true
	server, err := embed.StartEtcd(config)
	if err != nil {
		return err
	}
	defer server.Close()
	return untilStopped(server.Err())
}

// helmCommand is helm with its own flags; it parses os.Args itself.
func helmCommand() *cobra.Command {
	command, err := helm.NewRootCmd(os.Stdout, os.Args[1:], helm.SetupLogging)
	if err != nil {
		fmt.Fprintln(os.Stderr, "helm:", err)
		os.Exit(1)
	}
	return command
}
